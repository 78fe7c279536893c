"""What people look at: the page of results."""
