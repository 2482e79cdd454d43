# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Lossless coding of weights: codecs, coded shards, and the checkpoints that hold them."""
