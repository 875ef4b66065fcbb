"""One launch for all steps: resident (the recurrent matrix stays on the chip) and elementwise."""
