"""Video and sound: clips, frames and metadata, decoded on demand by PyAV.

`av_decoder` has the public `AVDecoder` and chooses clips; `media_file` opens a file, `metadata` says what it is.
`streams` and `whole` decode its video (by its packets, which `headers` judges, or from its beginning), `sound` its
sound.
"""

from energon_bridge.models.av.av_decoder import AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon_bridge.models.av.media_file import AVData

__all__ = ["AVData", "AVDecoder", "get_clips_uniform", "get_single_frames_uniform"]
