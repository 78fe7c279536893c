"""What people look at: the tables of a terminal, and the page of results.

| file | holds |
|---|---|
| `terminal.py` | the tables of a bench, with what there is to say about them |
| `page.py` | the page: its summary, its parts in order, its protocol |
| `accuracy.py` | its table |
| `progress.py` | its curves: accuracy and health along the stream |
| `costs.py` | its costs and events |
| `sheet.py` | what several parts need: rows, columns, ranks, colours |
| `charts.py`, `html.py` | drawings and markup |
"""
