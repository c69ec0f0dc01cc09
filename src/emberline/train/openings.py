"""First words of user turns and of plain text, and a few system prompts: all hand-written.

The model writes everything after them, so the training text is the target's own. No sentence of
any benchmark is here.
"""

from __future__ import annotations

MATHS = (
    "A baker", "A train leaves", "A farmer has", "If a car", "There are", "Tom has", "Maria buys",
    "A shop sells", "In a class of", "Calculate", "Solve for x", "Solve the equation", "Find the",
    "Find all", "What is the value of", "What is the area", "How many", "How much", "Let f(x)",
    "Simplify", "Compute", "Evaluate", "The sum of", "The ratio of", "A rectangle has",
    "A circle with", "Two numbers", "Each week,", "Last year,", "At a school,", "Suppose that",
    "Prove that", "A bag contains", "The probability", "What percentage", "If $x", "Given the",
    "Factor the", "Convert", "Anna and Ben", "A company", "Every morning,", "A tank holds",
    "The price of", "Determine the",
)  # fmt: skip
CODE = (
    "Write a function", "Write a Python", "Write a program", "Write code", "Implement a",
    "Implement the following", "Create a class", "Complete the", "Fix the", "Explain this code",
    "```python\ndef", "```python\nclass", "```\n", "def ", "Given a list", "Given a string",
    "Given an array", "Using Python,", "In JavaScript,", "Write a SQL", "Write a bash",
    "How do I sort", "How can I read", "Write a script", "Debug the", "Refactor", "Convert this",
    "Write unit tests", "Write a regular", "Design an algorithm", "Return the", "Parse the",
    "Here is a function", "Complete this function:\n\n```python\ndef", "My code", "Count the",
    "Check whether", "What does this", "In C++,", "Write an HTML",
)  # fmt: skip
GENERAL = (
    "What", "What is", "What are the", "Why do", "Why is", "How does", "How do I", "How can",
    "Can you", "Could you explain", "Explain", "Describe", "Tell me", "Who was", "Who is", "When",
    "Where", "Which", "Is it", "Are there", "Do you", "Should I", "Compare", "List", "Name three",
    "Give me", "I want", "I need", "I am", "I'm", "I have", "My", "The", "In", "Please", "Help me",
    "Hi", "Hello", "Define", "Discuss", "What happens", "What would", "What's the", "Recommend",
    "Suggest", "Teach me",
)  # fmt: skip
WRITING = (
    "Write a", "Write a short", "Write a story", "Write a poem", "Write an essay",
    "Write an email", "Write a letter", "Compose", "Draft", "Draft an email", "Create a",
    "Create an outline", "Imagine", "Continue the story", "Edit the", "Improve this",
    "Rewrite", "Rewrite the following", "Paraphrase", "Make this", "Write a review",
    "Write a blog", "Write a dialogue", "Write a speech", "Write a product", "Brainstorm",
)  # fmt: skip
EXTRACTION = (
    "Summarize", "Summarize the following", "Read the passage", "Read the following", "Extract",
    "Extract the names", "Identify", "Classify", "Translate", "Based on the", "From the text",
    "Given the following", "Answer the question", "Find the main", "Make a table", "Convert the",
    "Label each", "Analyze", "Sort these", "Context:", "Text:", "Question:", "Article:",
    "Return JSON", "Correct the grammar",
)  # fmt: skip
ROLE_PLAY = (
    "You are a", "You are an expert", "Act as", "Pretend", "Imagine you are", "As a teacher,",
    "As a doctor,", "Suppose you", "Let's play", "Take the role", "Be my", "Speak as",
    "Play the part", "Assume you are",
)  # fmt: skip
OPENINGS = MATHS + CODE + GENERAL + WRITING + EXTRACTION + ROLE_PLAY

PLAIN = (
    "The", "In", "A", "Once upon a time", "It was", "We", "This", "There", "When", "# ", "## ",
    "import", "def ", "from", "class", "Introduction", "Chapter 1", "Abstract", "By", "For", "If",
    "One day,", "According to", "Lesson", "Question:", "Recipe", "How to", "The history of",
    "Many people", "Step 1", "\n", "<html>", "#include", "Dear", "On Monday",
)  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful teacher. Explain each step.",
    "Answer in one or two sentences.",
    "You are a programmer. Reply with code and a short comment.",
    "You help with mathematics and check every result.",
    "You are a friendly writer with a rich vocabulary.",
    "Reply only with the requested information.",
    "You are an expert who answers with lists.",
)
