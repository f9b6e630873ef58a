"""What ties the package to other programs."""
