"""The CPU backend. It gives the same bits as every GPU kernel."""
