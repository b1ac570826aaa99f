"""What people look at: tables, pages, charts, clips."""
