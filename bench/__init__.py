"""Command lines of lamina: `lamina train`, `lamina nvme`, `lamina doctor`, `lamina plan` and comparisons.

Nothing imports this package; each command is imported only when it is called, so that `lamina --help`
stays fast.
"""
