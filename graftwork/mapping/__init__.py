"""Files of prompts, answered in shards by one process or by many (`graftwork map`)."""
