"""What lucidnn is like in use: models in plain PyTorch, and a training run beside the framework's own."""
