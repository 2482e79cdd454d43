# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Lossless coding: codecs, coded checkpoints, and models that are loaded from one."""
