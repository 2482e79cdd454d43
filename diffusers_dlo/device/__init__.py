# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The onload device: its streams, events and page-locking, and the ring of block-sized slots."""
