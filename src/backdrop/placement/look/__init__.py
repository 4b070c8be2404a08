"""What an inspection looks like: tables in text and colour, a picture, a page."""
