"""Will it fit? The one model of bytes: what a run does, what that takes of a GPU, and the plan that comes of it."""
