# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The ranks that share weights: who they are, how they agree, how they gather."""
