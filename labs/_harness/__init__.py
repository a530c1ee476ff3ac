"""Shared machinery of the labs; README.md beside this file maps the modules."""
