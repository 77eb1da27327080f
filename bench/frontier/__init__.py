"""`lamina frontier`: step time against memory, beside DeepSpeed and plain PyTorch."""
