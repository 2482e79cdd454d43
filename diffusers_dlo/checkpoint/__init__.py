# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Checkpoints on disk: which file a tensor's bytes lie in, and getting weights from there without a copy."""
