"""Device functions and the launcher shared by the Triton engines."""
