"""Tasks other than translation: named entities and question answering, on an XLM-R."""
