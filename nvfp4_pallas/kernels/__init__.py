"""HOW: one kernel per file, `<op>_<implementation>.py`. Nothing here imports nvfp4_pallas.ops."""
