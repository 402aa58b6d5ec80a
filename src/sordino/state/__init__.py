"""A run on disk: whole generations, the key and the journal.

    folder/
      key                    the secret, mode 0600; erased when the run is complete
      journal                what was about to be released, mode 0600; goes with the key
      step-00000120-7/       the seventh save, after step 120; the newest has the highest last number
        tensors.safetensors
        state.json           everything else, with a digest of the trainable parameters
        seal.json            digests of the two, the journal's length, and a tag under the run's key
      starting               there only until the first save is whole

A generation is written under a name that starts with a dot, synced, and then
renamed: a crash at any moment leaves the one before. It holds model, optimizer,
further objects, torch's random states, the public configuration (sampler, strategy,
noise multiplier, clip norm, ...), the steps released and where the noise stands. It
never holds the key. Two generations are kept.

`load` first checks everything there is to check, then changes things. If that still
fails half-way, the `Private` refuses all further use.
"""

from __future__ import annotations

from .folder import Folder, has_save
from .loading import load
from .saving import configuration, digest, save

__all__ = ["Folder", "configuration", "digest", "has_save", "load", "save"]
