"""NeMo RL's names. The modules that have these names in NeMo RL import or inherit them from here."""
