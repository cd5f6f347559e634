"""Measurements of nvfp4_pallas; not part of the installed package."""
