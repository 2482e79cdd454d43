# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
__version__ = "0.1.0.dev0"
