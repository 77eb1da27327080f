"""The optimizer step: state streamed through Adam, or a client's optimizer over state in memory."""
