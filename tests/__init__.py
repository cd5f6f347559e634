"""Tests of nvfp4_pallas: `python3 -m tests`."""
