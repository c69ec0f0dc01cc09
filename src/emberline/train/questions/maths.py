"""Mathematics as competitions pose it, in LaTeX: templates, all hand-written.

Numbers are free where any of them make a problem with an answer. Where the answer must be neat, the
template draws it first (<!m:2..7>) and builds the problem from it.
"""

from __future__ import annotations

from emberline.train.questions.fill import paragraphs

_ALGEBRA = paragraphs(r"""
<Solve for $x$:|Find $x$ if|Find the value of $x$ such that|Determine $x$ when> $<2..9>x <+|->
<1..30> = <10..90> <+|-> <1..5>x$.

<!p:1..9><!q:1..12>Find all real numbers $x$ that satisfy $x^2 - <=p+q> x + <=p*q> = 0$.

Given $p(t) = <2..6>t - <1..9>$ and $q(t) = t^2 + <1..8>t$, <find|compute|determine> $p(q(<1..5>)) -
q(p(<2..3>))$.

The roots of $x^2 - <5..20>x + <1..12> = 0$ are $r$ and $s$. Find $<r^2 + s^2|\frac{1}{r} +
\frac{1}{s}|(r+1)(s+1)|r^3 + s^3|(r - s)^2>$.

Simplify $\frac{<a:2..9>x^<3..6> y^<2..5>}{<=a*3>x^2 y}$, where $x$ and $y$ are nonzero.

<!m:2..7>Factor completely: $<k:2..5>x^2 - <=k*m*m>$<| over the integers>.

The sum of two numbers is $<20..60>$ and their difference is $<2..18/2>$. What is <their product|the
larger number|the sum of their squares>?

For what value of $k$ does the equation $x^2 + <2..14/2>x + k = 0$ have exactly one real solution?

<!p:-4..6><!q:1..7>Solve the system $$<a:2..5>x + <b:3..7>y = <=a*p+b*q>,$$ $$<c:1..4>x - <d:2..6>y
= <=c*p-d*q>$$ and give $x + y$.

Find the sum of all integers $n$ for which $|<2..4>n - <1..15>| \le <5..21>$.

How many integers $x$ satisfy $<a:3..20> < x^2 < <80..300>$?

If $x + \frac{1}{x} = <3..9>$, what is $<x^2 + \frac{1}{x^2}|x^3 + \frac{1}{x^3}|\left(x -
\frac{1}{x}\right)^2>$?

Determine the vertex of the parabola $y = <2..4>x^2 + <4..24/4>x - <1..15>$.

The line through $(<-6..0>, <1..8>)$ and $(<2..7>, <-5..9>)$ meets the $y$-axis at $(0, b)$. Find
$b$.

A line is perpendicular to $<2..9>x + <3..8>y = <1..24>$ and passes through $(<1..6>, <-4..5>)$.
Find its slope and its equation.

Let $a \star b = <2..5>a - <b^2|ab|3b|\frac{b}{2}>$. What is $<2..9> \star (<1..6> \star <2..8>)$?

An arithmetic sequence has first term $<2..15>$ and common difference $<3..9>$. <Find its
$<10..40>$th term.|What is the sum of its first $<8..30>$ terms?|Which is its first term that is
greater than $<200..500>$?>

A geometric sequence starts with $<a:2..9>$ and $<=a*3>$. What is its $<4..8>$th term?

<!m:5..25>Evaluate $\sqrt{<=m*m>} + \sqrt[3]{<8|27|64|125|216>} - <2..5>^<2..4>$.

Rationalize the denominator of $\frac{<2..9>}{\sqrt{<3|5|7|11>} <-|+> 1}$.

Compute $\log_<2(<8|16|32|64>)|3(<9|27|81>)> + \log_<4(<16|64>)|5(<25|125>)|6(36)|7(49)>$.

The polynomial $P(x) = x^3 - <2..6>x^2 + kx - <1..12>$ is divisible by $x - <1..4>$.
<Find|Determine> $k$.

Divide $x^<5..9> + <2..5>x^<2..4> - <1..9>$ by $x - <1|2|3>$ and give the remainder.

A function satisfies $f(x + y) = f(x) + f(y) + <1..4>xy$ for all real $x, y$ and $f(1) = <2..8>$.
Find $f(<4..9>)$.

<!k:3..15>The product of two consecutive integers is $<=k*k-k-1>$ more than their sum, and both are
positive. Find them.

Let $x$ and $y$ be positive numbers with $xy = <p:12..40>$ and $x^2 + y^2 = <!d:1..9><=p*2+d*d>$.
Compute $|x - y|$.

Find the largest possible value of $<10..40/2>x - <1..4>x^2$, where $x$ is a real number.

The numbers $<3..20>$, $x$ and $<40..90>$ form <an arithmetic|a geometric> sequence in this order.
Find <the positive value of $x$|all possible $x$>.

How many real solutions does $(x^2 - <4..25>)(x^2 + <1..9>x + <2..20>) = 0$ have?
""")

_NUMBERS = paragraphs(r"""
<!a:2..12><!b:2..9>What is the greatest common divisor of $<=a*b*12>$ and $<=a*18>$?

How many positive divisors does $<2|3>^<2..6> \cdot <5|7>^<2..4> \cdot <11|13>^2$ have?

A number $n > <10..60>$ satisfies $n \equiv <1..3> \pmod{<4|5>}$ and $n \equiv <2..6>
\pmod{<7|9|11>}$. What is the least such $n$?

How many integers between $<50..150>$ and $<400..900>$ are divisible by $<3|4|6>$ <but not by|or
by|and also by> $<5|7>$?

Add up all <distinct prime factors|positive divisors|odd divisors> of $<60..600/6>$. What do you
get?

Find the number of zeros at the end of <$<20..60>!$|the product $1 \cdot 2 \cdot 3 \cdots
<20..60>$>.

How many three-digit <positive integers|numbers> have digits whose sum is $<3..9>$?

The digits of a two-digit number add up to $<7..13>$. If the digits are exchanged, the number grows
by $<9|18|27>$. What is the number?

Find all pairs $(m, n)$ of positive integers with $<2..5>m + <3..7>n = <30..60>$.

Let $n$ be a positive integer such that $<2..7>n \equiv <1..5> \pmod{<11|13|17>}$. What is the
smallest such $n$?

Which primes divide $<9..14>! + <6..8>!$?

For how many positive integers $n \le <50..200/10>$ is $n^2 + <1..3>n$ a multiple of $<4|5|6|8>$?
""")

_COUNTING = paragraphs(r"""
<In a row|Around a round table>, $<4..8>$ guests take their seats, and two of them <must be
neighbors|must not be neighbors>. How many seatings are possible?

How many different <arrangements|orders> are there of the letters of the word
<BANANA|PEPPER|LETTER|COFFEE|BALLOON|SUMMER|COMMITTEE|PARALLEL>?

From a bag with $<3..9>$ <color> and $<2..8>$ <color2> beads, <name> takes two without looking. How
likely is it that <they match|they differ|both are <color>>? Give a fraction in lowest terms.

Two fair dice are rolled. What is the probability that <the sum is $<4..11>$|the product is even|the
larger number is $<3..6>$|the two numbers differ by $<1..3>$>?

A fair coin is flipped $<4..9>$ times. Find the probability of <exactly|at least|at most> $<2..3>$
heads.

A committee of $<3..5>$ is chosen from $<5..8>$ women and $<4..7>$ men. How many committees contain
<exactly two women|at least one man|more women than men>?

How many <four|three|five>-digit numbers can be formed from the digits $1, 2, 3, 4, 5, <6|7|8>$ if
<no digit is repeated|digits may be repeated|the number must be even and no digit is repeated>?

In a group of $<n:40..80>$ people, $<15..30>$ speak French, $<12..25>$ speak German and $<3..9>$
speak both. How many speak neither?

Each of $<3..6>$ friends picks one of $<5..9>$ <cards|hats|colors> at random. What is the
probability that no two pick the same one?

How many subsets of $\{1, 2, \ldots, <6..10>\}$ contain <no two consecutive numbers|exactly $<2..4>$
elements|at least one even number>?

A number is chosen at random from $1$ to $<30..100/5>$. What is the probability that it is <a
perfect square|a prime|divisible by $<3..9>$|a multiple of both $2$ and $<3|5|7>$>?

Count the ways to <put|place> $<4..8>$ <identical|different> balls into $<2..4>$ different boxes<|
so that no box is empty| if boxes may stay empty>.

<Name> throws a dart at a square target of side $<6..20/2>$ that has a circle of radius $<1..3>$ in
its middle. If each point is equally likely to be hit, what is the probability of hitting the
circle?

What is the expected value of the <sum|larger|product> of the numbers on two fair
<four|six|eight>-sided dice?
""")

_GEOMETRY = paragraphs(r"""
The legs of a right triangle are $<3..12>$ and $<4..15>$. Find the length of <the hypotenuse|the
altitude to the hypotenuse|the median to the hypotenuse>.

A circle has a <radius|diameter> of $<4..20>$ <cm|inches|units>. What is its area? Express your
answer in terms of $\pi$.

In triangle $ABC$, $\angle A = <30..70>^\circ$ and $\angle B = <40..80>^\circ$. The bisector of
angle $C$ meets $AB$ at $D$. What is $\angle CDB$, in degrees?

<!n:1..9>A rectangle is $<2..5>$ times as long as it is wide, and its <perimeter is $<=12*n>$|area
is $<=15*n>$>. Find the length of its diagonal.

The base of an isosceles triangle is $<6..24/2>$ and its equal sides are $<13..25>$. What is its
area?

Points $A(<-5..5>, <-4..6>)$ and $B(<6..12>, <-3..9>)$ are the ends of a <segment|diameter of a
circle>. Find <its midpoint|the length of $AB$|the equation of the perpendicular bisector of $AB$>.

A <cylinder|cone> has a base of radius $<2..9>$ and a height of $<4..15>$. What is its volume, in
terms of $\pi$?

Each interior angle of a regular polygon measures $<108|120|135|140|144|150|156>^\circ$. How many
<sides|diagonals> does it have?

Two circles with radii $<2..6>$ and $<7..12>$ touch each other from the outside. How long is the
segment of a common outer tangent between the points where it touches them?

A chord of length $<6..16/2>$ lies at distance $<2..9>$ from the center of a circle. Find the
<radius|area> of the circle.

A square is inscribed in a circle of area $<4..36/4>\pi$. <What is the area of the square?|How long
is its side?|What is the area of the region inside the circle and outside the square?>

Find the area of the region enclosed by $x^2 + y^2 - <2..8/2>x + <4..12/2>y = <1..20>$.

Point $P$ is on side $BC$ of triangle $ABC$ so that $BP : PC = <1..3> : <2..5>$. If the area of
$ABC$ is $<20..90>$, what is the area of triangle $ABP$?

How many <cubes|boxes> with sides of $<2..3>$ cm fit into a box that is $<12..24/6>$ cm by
$<18..30/6>$ cm by $<6..36/6>$ cm?

The point $(<1..9>, <1..8>)$ is reflected over <the $x$-axis|the line $y = x$|the $y$-axis> and then
moved $<2..6>$ units to the <left|right>. What are its coordinates?
""")

_PRECALCULUS = paragraphs(r"""
Find the exact value of $\<sin|cos|tan> <15|75|105|120|135|150|210|225|240|300|330>^\circ$.

If $\<sin|cos> \theta = \frac{<3|5|8>}{<13|17|25>}$ and $\theta$ is acute, what is $\<tan|cos 2|sin
2> \theta$?

Solve $2 \<f:sin|cos>^2 x <+|-> \<f> x - 1 = 0$ for $0 \le x < 2\pi$.

Write $\frac{<1..9> + <1..7>i}{<2..5> - <1..4>i}$ in the form $a + bi$.

Let $z = <1..5> + <2..7>i$ and $w = <2..6> - <1..4>i$. <Find|Compute> $z \overline{w} + |w|^2$.

Find the distance between the point $(<1..5>, <-3..4>, <0..6>)$ and the plane $<1..3>x + <1..2>y -
2z = <1..12>$.

For which $k$ are the vectors $\langle <1..6>, k \rangle$ and $\langle <-5..-1>, <2..8> \rangle$
<orthogonal|parallel>?

Find the sum of the infinite series $<2..9> + \frac{<a:1..5>}{<3|4>} + \frac{<a>}{<9|16>} + \cdots$,
if the terms after the first form a geometric sequence.

Evaluate $\sum_{k=1}^{<8..30>} (<2..5>k <+|-> <1..6>)$.

For which real $x$ is $\frac{\sqrt{x <+|-> <1..9>}}{x^2 - <4|9|16|25>}$ defined? Express your answer
in interval notation.

Find the derivative of $f(x) = <2..6>x^3 - <1..9>x^2 + \<sin x|ln x|sqrt{x}|cos 2x>$ at $x =
<1..3>$.

Compute $\int_<0..1>^<2..4> (<2..6>x^2 <+|-> <1..5>x) \, dx$.

Determine $\lim_{x \to <a:1..5>} \frac{x^2 - <=a*a>}{x - <a>}$.

Find the maximum area of a rectangle whose perimeter is $<20..80/4>$<| and prove that it cannot be
larger>.

The parabola $y = x^2$ and the line $y = <1..4>x + <2..6>$ meet at two points. How far apart are
they?

Prove that $<n^3 - n|n^3 + 5n|n(n+1)(n+2)>$ is divisible by $<3|6>$ for every positive integer $n$.
""")

MATHS_PROBLEMS = _ALGEBRA + _NUMBERS + _COUNTING + _GEOMETRY + _PRECALCULUS
