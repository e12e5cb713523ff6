"""Rendered waybills with known text, for tests and records of reading.

Fonts: Debian's fonts-dejavu-core, fonts-liberation and fonts-wqy-zenhei.
"""
