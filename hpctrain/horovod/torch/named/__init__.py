"""Operations that ranks submit by name in any order."""
