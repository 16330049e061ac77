"""The style of the plots of all tools."""
