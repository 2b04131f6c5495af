"""Cross-entropy between logits and targets."""
