# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The rows of `check_npu.py`: what is assumed of a device, and how each assumption is checked."""
