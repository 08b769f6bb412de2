"""What knows trainers. Each is imported only when what needs it is used."""
