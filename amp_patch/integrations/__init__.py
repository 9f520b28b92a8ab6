"""amp_patch under trainers and trackers of others, each module imported only by its name: `lightning`, `huggingface`,
`accelerate`, `trackers`.
"""
