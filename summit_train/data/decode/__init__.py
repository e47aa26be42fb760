"""All that PyAV does: videos, pictures and their pixels, and a small encoder. No other module imports `av`.

`clips` puts together what these modules give.
"""

from summit_train.data.decode.encode import write_video
from summit_train.data.decode.pictures import PictureReader, probe_picture
from summit_train.data.decode.render import Frames, Renderer
from summit_train.data.decode.videos import MAX_HELD_BYTES, count_packets, probe, read_by_jumps, read_from_start

__all__ = [
    "MAX_HELD_BYTES",
    "Frames",
    "PictureReader",
    "Renderer",
    "count_packets",
    "probe",
    "probe_picture",
    "read_by_jumps",
    "read_from_start",
    "write_video",
]
