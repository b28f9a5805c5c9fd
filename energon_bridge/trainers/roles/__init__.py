"""One plan for several grids: language ranks load tokens, encoder ranks media. See `roles` first, then `encoding`."""

from __future__ import annotations

from energon_bridge.trainers.roles.encoding import EncoderBatch
from energon_bridge.trainers.roles.roles import Roles, make_roles

__all__ = ["EncoderBatch", "Roles", "make_roles"]
