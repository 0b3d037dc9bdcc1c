"""Whole models: quantize, calibrate, save, load."""
