"""Caffe layers, one file per family."""
