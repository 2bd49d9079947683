"""The report of runs as one HTML page: curves.py and run_facts.py read a run folder, page.py writes the page. No torch.

The page needs no network: its style and script are page.css and page.js, and page.html is a template that escapes
every text. page.js draws the curves from a JSON table in the page; without scripts all else can be read.
"""
