"""Adapters for trainers and experiment trackers: `lightning`, `huggingface`, `accelerate`, `trackers`. Import the
module that you need; this package imports none of them.
"""
