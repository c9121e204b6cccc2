"""What ``gpu_suite.py`` is made of. Importing this package imports neither torch nor triton."""
