"""What knows trainers. None of them is imported: their objects are taken as they come."""
