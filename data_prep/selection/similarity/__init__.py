"""How texts are compared: words and n-grams, signatures of near duplicates, overlap with test rows."""
