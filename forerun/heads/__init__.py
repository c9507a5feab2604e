"""Trainable layers."""
