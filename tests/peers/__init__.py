"""What TRL's own tests ask of its trainers, asked of ours."""
