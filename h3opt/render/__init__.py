"""Output for people: tables, pages, charts, pictures and clips."""
