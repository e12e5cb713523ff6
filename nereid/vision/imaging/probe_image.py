"""The mark of images that are not traffic."""


class ProbeImage(bytes):
    """The encoded image of a health check or a warm-up; it has no signals."""
