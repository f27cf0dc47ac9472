"""Datasets, prompt templates, prompt sources that resume, packing and balancing.

Training loops and rewards do not belong here.
"""
