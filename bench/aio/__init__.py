"""`lamina aio`: the file I/O beside fio and DeepSpeed."""
