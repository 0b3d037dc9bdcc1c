"""The CPU backend: the same bits as every GPU kernel."""
