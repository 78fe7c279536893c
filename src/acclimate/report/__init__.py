"""The output for people: tables on a terminal, and the page of results.

| file | contents |
|---|---|
| `terminal.py` | the tables of a bench on a terminal, with remarks |
| `verdict.py` | the result of a table in one sentence |
| `page.py` | the page: its summary, its sections in order, its protocol |
| `accuracy.py` | the table of accuracies |
| `progress.py` | the curves of accuracy and health along the stream |
| `costs.py` | the costs and events |
| `sheet.py` | the rows, columns, ranks and colours that several sections share |
| `charts.py`, `html.py` | drawings and markup |
"""
