"""Model families: one file each, the border where a pipeline's own conventions become the house's."""
