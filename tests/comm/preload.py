"""Imported once by the fork server of `ranks.py`, so that forked ranks need not."""

from __future__ import annotations

import torch.distributed
import torch.nn.parallel
import torch.utils.checkpoint

import baguarun.comm.ddp
import baguarun.comm.extension
import baguarun.torch_api

baguarun.comm.extension.load_extension()
