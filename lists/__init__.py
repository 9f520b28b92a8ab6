"""The presets and the op lists of amp_patch: data only."""
